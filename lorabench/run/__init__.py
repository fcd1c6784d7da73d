"""Many cells, on one machine or many: the queue, the runner of one cell, its processes and ranks, and what a person
sees.

Belongs here: processes, time-outs, deaths and their records; the store is written by the sweep alone.
May import: contract, plan, record, measure.
"""
