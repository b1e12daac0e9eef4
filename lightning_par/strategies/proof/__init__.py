"""The proof that the steps of a run equal those of one process, and what to do where they do not.

Note [Order of a proof]: the mesh takes its step as always, and what it computed is noted on the
way: weights before, batches, losses, gradients, weights after. Rank 0 then takes the same step on
one device with a Trainer of one process, and compares. So errors of the user's own code come from
the mesh, activations of both are never held at once, and nothing that the proof does can change the
step. A difference ends the run on every rank before the next step.
"""
