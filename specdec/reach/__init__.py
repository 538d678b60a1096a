"""The reach ring: live models, draft heads, checkpoints and ranks, assembled into engines of the core."""
