"""A small transformer that learns by GRPO on two CPU cores, from rollouts that flow through Forebay.

    tasks.py       what is to be learned, and its rewards       grpo.py        how the policy learns from groups
    model.py       the policy                                   warm_start.py  enough of the form to begin with
    engine.py      an inference engine in a thread              checkpoint.py  weights, and the plane with them
    agent_loop.py  Forebay's contract around it                 run.py         the whole loop: begin to read here
    cluster.py     a Ray for the time of a run, if engines and buffer are to be actors

In a trainer of your own, agent_loop.py and run.py stay much as they are; the rest is your model and your engine.
"""
