"""Measurements that users run, and the files that results go to."""
