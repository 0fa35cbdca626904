"""The model: its shape (spec), rotary table (rope), weights and one decoder for all architectures."""
