"""Training steps as CUDA graphs: `capture` for one's own loop, `captured` for a trainer. It works on any model, after
`apply` or without it. (The folder is not called `capture`, because the function has that name.)
"""
