"""The tools ring: the trainer, the doctor, benchmarks, the server and the command line."""
