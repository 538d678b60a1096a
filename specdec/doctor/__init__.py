"""`specdec doctor`: describes a draft, measures its cost and its acceptance on a target, and finds why that is low.

facts.py lists what was read, cost.py prices a round, rows.py runs a draft on the target's own text, and readings.py
lists other ways to read a head; search.py tries them, examine.py concludes.
"""
