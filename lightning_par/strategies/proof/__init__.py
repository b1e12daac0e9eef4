"""A proof at the start: the first optimizer step on the mesh against the same step on one process.

Note [Order of the proof]: the mesh takes its first step as always, and what it computed is noted on
the way: weights before, batches, losses, gradients, weights after. Rank 0 then takes the same step
on one device with a Trainer of one process, and compares. So errors of the user's own code come
from the mesh, activations of both are never held at once, and nothing that the proof does can
change the step. A difference ends the run on every rank before a second step.
"""
