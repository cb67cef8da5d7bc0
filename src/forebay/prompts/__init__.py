"""Which prompt comes next: data sets, how a record becomes a prompt, and samplers."""
