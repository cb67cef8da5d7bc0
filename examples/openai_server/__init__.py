"""The trainer's loop against an OpenAI-compatible HTTP endpoint: what a vLLM or SGLang user would start from.

server.py   the tiny engine behind /v1/completions, in a process of its own (yours is vLLM or SGLang)
train.py    the trainer: OpenAIAgentLoop, rewards, weight sync, checkpoints: begin to read here
"""
