"""Files and batches: requests on disk, run while the engine is otherwise idle.

This package knows neither HTTP nor prompts: functions from a body to an answer are passed in.
"""
