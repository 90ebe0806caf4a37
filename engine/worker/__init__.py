"""The worker: one rank's model runner and the rooms it is made of. Imports torch; the API process never comes here."""

import os

# Threads that wait for each other by spinning take the cores from the API process, and from each other: with one more
# busy process on two cores a decode step took up to a hundred times longer. OpenMP reads this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
