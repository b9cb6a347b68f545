"""What tests share: fakes of the interfaces, small models and rows, oracles, and runs of whole commands."""
