"""Draft workers, one a file, and the algorithm table that says in data how they differ."""
