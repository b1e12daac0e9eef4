"""What a run does once: the look at its first step, before this is proved.

Note [Order of a start]: before the first batch, the user's step runs on a few samples and on parts
of them, so that the mesh knows how to divide it (`first_look`). Then the mesh takes its first step
as always, which is proved to equal that of one process; see Note [Order of a proof].
"""
