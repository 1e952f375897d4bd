"""What describes any family: the fields of an architecture, rules from parameters to tensors, wrappers and towers."""
