"""What lowered modules are written in. Imports cutlass: only lowered modules import this."""
