"""Toggles that cheat, each by one trick, and honest ones that look as if they did. `test_zoo.py` measures all of them.

Whoever finds another trick adds it as one class (a `Cheat`, or an `Honest` against a false alarm) to the module where
it belongs, or to a new one: it is found there, installed and measured without being named anywhere else.
"""
