"""JSON Schemas, made ready for llguidance.

* `references`: places in a schema, and the references to them;
* `empty_parts`: parts that no value satisfies;
* `property_names`: objects that have no name left for a further property.
"""
