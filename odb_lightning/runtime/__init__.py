"""Processes, transport and exchange: how samples get from the workers to the training process."""
