"""The Python front end: semantic functions, variables, sessions and the client that submits them."""
