"""Fine-tuning jobs on one base, trained for their adapters and not for a figure: `lorabench jobs`.

Belongs here: what lives as long as a training run does (models, jobs, steps, their state on the disk).
May import: contract, schedule, plan, record, measure.
"""
