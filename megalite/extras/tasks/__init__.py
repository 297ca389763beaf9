"""Downstream tasks in the form of lm-eval's YAML files, evaluated in the training run (`--eval-tasks`)."""
