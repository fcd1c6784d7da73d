"""Which few toggles to switch on: rounds of cells within a budget, what they come to, and the code to paste.

Belongs here: what decides the next cell from the records so far, and the words of the recommendation.
May import: contract, plan, record, measure, run, report; nothing imports it but the commands.
"""
