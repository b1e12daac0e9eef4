"""What a run does once: the look at its first step, and the proof that this equals one process.

Note [Order of a start]: before the first batch, the user's step runs on a few samples and on parts
of them, so that the mesh knows how to divide it (`first_look`). Then the mesh takes its first step
as always, and what it computed is noted on the way: weights before, batches, losses, gradients,
weights after. Rank 0 then takes the same step on one device with a Trainer of one process, and
compares. So errors of the user's own code come from the mesh, activations of both are never held at
once, and nothing that the proof does can change the step. A difference ends the run on every rank
before a second step.
"""
