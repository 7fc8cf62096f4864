"""Lower a program to a CuTeDSL module, and compile that to machine code."""
