"""What a cell came to: the schema of a record, its statistics, and the store that holds it.

Belongs here: the record's fields, the reading of older schemas, the ratio of two lists of trials, records.jsonl.
May import: contract, plan.
"""
