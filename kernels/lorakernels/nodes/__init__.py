"""The autograd nodes `project` and `gated_mlp`, and what they are made of: a frozen linear with its adapter, the
operand buffer, the products of forward and backward. They know tensors, and nothing of a model's modules.
"""
