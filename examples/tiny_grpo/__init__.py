"""A small transformer that learns by GRPO on two CPU cores, from rollouts that a Forebay loader brings.

    run.py         the whole loop: begin to read here           grpo.py        the loss, on tensors of a batch
    tasks.py       what is to be learned, and its rewards       warm_start.py  enough of the form to begin with
    model.py       the policy                                   checkpoint.py  weights, and the loader with them
    engine.py      an inference engine in a thread              demo.py        what `forebay demo` adds: log, report,
    agent_loop.py  Forebay's contract around it                                and a test that kills the run
    cluster.py     a Ray for the time of a run, if engines and buffer are to be actors

In a trainer of your own, agent_loop.py and run.py stay much as they are; the rest is your model and your engine.
"""
