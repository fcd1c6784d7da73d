"""Hydra's configuration: the defaults of every key, and a file for each model, workload and named sweep.

Belongs here: YAML alone; a new model, workload or suite is a file and no code.
May import: nothing.
"""
