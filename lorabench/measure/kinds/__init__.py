"""The kinds of cell, one file each, found by the entry points in the group `lorabench.kinds`.

Belongs here: all that depends on what a cell's arms are. No other folder decides anything by the name of a kind or
phase. May import: contract, plan, record, the rest of measure; torch and PEFT only inside functions of what planning
asks.
"""
