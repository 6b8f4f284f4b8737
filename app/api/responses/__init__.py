"""`/v1/responses`, and the responses stored on disk so that a later request can continue them."""
