"""Adapters from models of training frameworks to the arguments of gates, a module for each framework."""
