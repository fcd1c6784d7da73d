"""Which cells a command becomes: composing the configuration, finding toggles by name, designs, samples, estimates.

Belongs here: everything that is known before a process is started.
May import: contract, schedule.
"""
