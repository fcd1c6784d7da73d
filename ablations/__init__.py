"""The toggles that come with lorabench: a file a slot, a class a toggle.

Belongs here: what is switched on and how it is proved to be at work; nothing that measures.
May import: lorabench and lorakernels; neither imports this, the entry points in pyproject.toml name every class.
"""
