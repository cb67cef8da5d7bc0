"""The trainer of `tiny_grpo` on Ray: engines, a producer, the buffer and the trainer, each in its own process.

trainer.py    connects a loader, trains, sends weights, saves: begin to read here
producer.py   an actor with the tasks, which has prompts answered by engine actors
run.py        the command line
"""
