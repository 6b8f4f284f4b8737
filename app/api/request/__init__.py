"""From a request's fields to a job, for every API."""
