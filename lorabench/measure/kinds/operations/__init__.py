"""The operations that kind `op` measures alone, one file each. The model's type says which one a cell has."""
