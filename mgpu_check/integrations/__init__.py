"""Adapters that gate the models of training frameworks, a module for each framework. None is imported by default.

An adapter prepares the arguments of `assert_step_scales`: how the framework builds its model on one device, divides it
at a mesh, and trains it, and the slices of parameters that a rank then holds.
"""
