"""Container images made from what is on this machine, without a registry and without a builder.

An image is a stack of layers that change at different speeds: the interpreter, the dependencies (gigabytes with torch),
the model, our code (kilobytes). Each has a key, is made once and is handed to containerd once.
"""
