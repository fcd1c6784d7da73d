"""The operations: each with its formula, a reference in float32, the Triton kernel and a torch path for a CPU. What
holds weights, autograd nodes and the model are in the folders above; here are functions of tensors.
"""
