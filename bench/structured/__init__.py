"""Grammars of answers: which schemas compile, which instances are accepted, what a mask costs."""
