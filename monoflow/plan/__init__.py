"""StepGraph -> Plan: how every tensor of the step lies over the devices."""
