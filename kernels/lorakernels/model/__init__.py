"""The model: which of its modules are what they seem, the forwards that are bound to them, and `apply`, `remove` and
`status`. PEFT and transformers are only looked at, never imported.
"""
