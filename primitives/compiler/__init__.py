"""From a program to the text of a CuTeDSL module, and from that to machine code."""
