"""Tensors of a model that files hold in another form: in fewer bits, or several in one. Trainer and vLLM read through
these views, so both have the same bits. Imports neither megatron nor vLLM."""
