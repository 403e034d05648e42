// Package quartet is a layer-4 load balancer for Linux data centres; this root holds no code, only
// the tests of the house rules: who may import whom, and what every package and file must say.
package quartet
