"""Lower a program to a CuTeDSL module, and compile the module to machine code."""
