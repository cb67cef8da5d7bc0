"""The trainer of `tiny_grpo` on Ray: engines, a producer, the buffer and the trainer, each in a process of its own.

producer.py   an actor that draws prompts and has them answered by engine actors
trainer.py    leases batches, trains, acknowledges, saves, sends weights: begin to read here
run.py        the command line
"""
