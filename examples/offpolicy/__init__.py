"""Soft actor-critic on Pendulum: a thread collects, the learner draws from Forebay's trajectory replay buffer.

    sac.py         how the policy learns from a batch          collect.py     environments in a thread, and the pace
    checkpoint.py  weights, and the buffer with them           run.py         the whole loop: begin to read here

In a trainer of your own, collect.py and checkpoint.py stay much as they are; the rest is your model and your task.
"""
