"""`specdec doctor`: describes a draft, measures its cost and its acceptance on a target, and finds causes of low
acceptance.

facts.py lists facts of files and weights, rows.py runs a draft on the target's own text, readings.py tries other ways
to read a head, examine.py measures and concludes; the command prints.
"""
