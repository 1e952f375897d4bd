"""The families of models that can be trained. Families that differ from a Llama by options are rows of `dense.py`,
`mixture.py` and `recurrent.py`; others are in `own/`. `shared/` and `parts/` have what families use."""
