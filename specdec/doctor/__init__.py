"""`specdec doctor`: what a draft is, what it costs, what it gives on a target, and what is wrong if that is little.

facts.py says what was read, cost.py what a round costs, rows.py runs a head beside the target's own text, and
readings.py names the other ways in which it could be meant; search.py tries them, examine.py concludes.
"""
