"""What things are: toggle, kind, arm, step, batch, job, workload, model, machine, as types.

Belongs here: the words of the design as classes, without anything that plans, measures, stores or draws.
May import: nothing of lorabench outside this folder.
"""
